#!/bin/sh
# Train on a Ray cluster: submits the current folder as a Ray job and prints its log. The same command starts the run and
# resumes it after a failure.
#
# To try it with a cluster on this machine:
#
#   export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$(openssl rand -hex 32)"
#   ray start --head
#   examples/submit/submit.sh http://127.0.0.1:8265 demo
#   ray stop
#
# For a real cluster, change the address, the token, and RUNS, a folder shared by all nodes. Every node needs this package.
# Your configurations, and the prompts and Python files that they name, are uploaded if they are in the current folder.
# .rayignore lists files not to upload.
set -eu
address=${1:?"is missing; usage: submit.sh ADDRESS CONFIG… [OPTIONS], with an address such as http://127.0.0.1:8265"}
shift
exec ray job submit --address "$address" --working-dir . -- \
  solrl train --set run.root="${RUNS:-$HOME/solrl-runs}" "$@" --continue # your --set options win
