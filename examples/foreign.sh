#!/bin/sh
# A producer that is nothing but redis-cli: two commands per task. `foreign.sh NAME...` greets through examples/peer.py.
# The first command stores the task; the second is a hint for idle peers, without which it is found by the next scan.
set -eu
queue='worqr:{greetings}'

for name in "$@"; do
    redis-cli -u "${WORQR_URL:-redis://localhost:6379/0}" <<COMMANDS
LPUSH $queue "$name"
PUBLISH $queue 1
COMMANDS
done
