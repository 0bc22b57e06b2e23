#!/bin/sh
# Train on a Ray cluster: the present folder goes there as a Ray job, and its log comes back. The same command begins the
# run, and resumes it after a failure.
#
# A cluster on this machine, for trying it:
#
#   export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$(openssl rand -hex 32)"
#   ray start --head
#   examples/submit/submit.sh http://127.0.0.1:8265 demo
#   ray stop
#
# A real one differs in its address, its token, and RUNS, a folder that all its nodes see. Every node needs this package.
# Configurations of your own, and the prompts and Python files that they name, go along if they are in the present folder.
# .rayignore names what does not.
set -eu
address=${1:?"is missing; usage: submit.sh ADDRESS CONFIG… [OPTIONS], with an address such as http://127.0.0.1:8265"}
shift
exec ray job submit --address "$address" --working-dir . -- \
  solrl train --set run.root="${RUNS:-$HOME/solrl-runs}" "$@" --continue # a --set of yours wins
