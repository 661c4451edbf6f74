"""Every claim about speed and memory, as ratios measured side by side in one run. Run as `python -m benchmarks.NAME`.

openai.py       one stream, server against server          concurrent.py   many streams; --alone --serial checks replies
cache.py        turns, edits, shared text, forks, restart  fairness.py     short requests behind a long prompt
agents.py       a long session and its subagents           store.py        rows on disk: restore, bytes, slow disk
internals.py    asks, device hop, doors, plans, bank, index
decode.py, rows.py, quantized.py, blas.py, qsa.py, ask.py, embedding.py   parts without HTTP
common.py       flags, tables, JSON, hardware              client.py       a timed streaming client
servers.py      servers started and stopped                peers.py        the other servers: built, exported, launched
report.py       results as markdown tables                 __main__.py     the short set, under ten minutes
"""

__all__: list[str] = []
