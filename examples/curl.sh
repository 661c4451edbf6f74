#!/bin/sh
# Talks to a server started with `make serve`. Every reply says what it reused: look at "onecopy" and "cached_tokens".
set -eu
url=${ONECOPY_URL:-http://127.0.0.1:8080}
post() {
    curl -sS "$url$1" -H 'content-type: application/json' ${ONECOPY_API_KEY:+-H "authorization: Bearer $ONECOPY_API_KEY"} -d "$2"
    echo
}

echo '# a chat'
post /v1/chat/completions '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0, "max_tokens": 20
}'

echo '# the same chat, one turn on: only its new tokens are evaluated'
post /v1/chat/completions '{
  "messages": [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "And of Italy?"}
  ],
  "temperature": 0, "max_tokens": 20
}'

echo '# a stream of events'
post /v1/chat/completions '{
  "messages": [{"role": "user", "content": "Count to five."}],
  "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 20
}'

echo '# a reply that must follow a schema'
post /v1/chat/completions '{
  "messages": [{"role": "user", "content": "Is Paris in France?"}],
  "max_tokens": 40,
  "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"], "additionalProperties": false
  }}}
}'

echo '# conversations that are kept'
curl -sS "$url/v1/sessions" ${ONECOPY_API_KEY:+-H "authorization: Bearer $ONECOPY_API_KEY"}
echo
