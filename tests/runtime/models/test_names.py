from pathlib import Path

import pytest
from onecopy.runtime.errors import ModelLoadError
from onecopy.runtime.models import list_models, names, resolve

from tests.support.checkpoints import write_checkpoint
from tests.support.gguf import write_gguf


def test_a_directory_lists_its_models_and_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "b-model")
    write_gguf(tmp_path / "a-model.gguf")
    (tmp_path / "notes.txt").write_text("not a model")
    (tmp_path / "empty").mkdir()
    found = [source for source in list_models(tmp_path) if source.path.is_relative_to(tmp_path)]
    assert [(s.id, s.kind) for s in found] == [("a-model", "gguf"), ("b-model", "hf")]
    assert [s.nbytes for s in found] == [
        s.path.stat().st_size if s.kind == "gguf" else weight_bytes(s.path) for s in found
    ]


def weight_bytes(path: Path) -> int:
    return (path / "model.safetensors").stat().st_size


def test_a_directory_that_is_not_there_lists_only_the_bundled(tmp_path: Path) -> None:
    assert list_models(tmp_path / "nowhere") == list_models()


def test_a_relative_path_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny").path == tmp_path / "tiny"


def test_a_bundled_model_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.BUNDLED, "other", "no_such_package")
    with pytest.raises(ModelLoadError, match="install the package no-such-package"):
        resolve("other")
    assert "other" not in {source.id for source in list_models()}
