# Half an hour of one card: what docs/performance.md says of a rollout's tail and of whole steps, on one commit.  Calls, sent at once:
#   .carry/base     bash experiments/sitting/unpack.sh; setsid bash experiments/sitting/rollout_tail.sh checks > /tmp/checks.log 2>&1 < /dev/null &
#                   sleep 5; tail /tmp/checks.log
#   .carry/vllm-a   and b, c: as in whole_steps.sh; .carry/rest and .carry/more: as in README.md
#   .carry/part     touch /tmp/queue.log; ARMS=int8 PROCESSES=1 setsid bash experiments/sitting/begin.sh 1 > /tmp/begin.log 2>&1 < /dev/null &
#                   sleep 5; tail /tmp/begin.log
# then `bash experiments/sitting/wait.sh 575`, three times; .carry/base/queue.sh is `bash experiments/sitting/rollout_tail.sh timings`.
# Tests, verify, vLLM's installation and the start of 443m share the card with the start of SmolLM2; then each timing has it alone, the least known first.
. experiments/sitting/environment.sh
cd $TREE || exit 1; export CUDA_MPS_PIPE_DIRECTORY=/tmp/none; out=/tmp/tail/rows; mkdir -p $out
verify() { name=$1; shift; run verify-$name isobit.cli.main verify --shape qwen3-8b --precision int8 --back_end hopper --json "$@"; }
checks() {
  run prewarm benchmarks.prewarm
  timeout -s INT -k 20 300 python3 -m pytest -q -n 4 -p no:cacheprovider --timeout 240 --tb short -rf --back-end hopper \
    tests/gpu/test_{drafts,exactness,shared_prefix,replay,repeat}.py > $out/tests.log 2>&1 & testing=$!
  python3 -m experiments.proof ladder $PROOF --size 443m -- --rollout.kv_memory_gib 8 --checkpoint.every 0 > $out/start-443m.log 2>&1 & starting=$!
  verify 8b; verify 8b-few --prompts 4 --samples 4 --longest 4096 --max-new-tokens 1024
  wait $testing; since "tests: $?"; tail -n 3 $out/tests.log; wait $starting; since "443m: $?"
  until [ -e /tmp/vllm/whole ]; do sleep 1; done; install_vllm
}
guesses() { LIMIT=150 run guesses-$1 benchmarks.speculation --precision int8 --repeats ${REPEATS:-6} "${@:2}"; }
timings() {
  until [ -e /tmp/checked ]; do sleep 1; done; cat /tmp/checks.log
  for task in multiply gsm; do guesses smollm2-$task --folder $PROOF/start/model --prompts $PROOF/data/$task.train.jsonl; done
  run shared_prefix benchmarks.shared_prefix
  run order benchmarks.order --mode int8
  REPEATS=2 guesses 8b --shape qwen3-8b --replay 0.7
  for task in multiply gsm; do guesses 443m-$task --folder $PROOF/start-443m/model --prompts $PROOF/data/$task.train.jsonl; done
  steps="benchmarks.end_to_end native --out $out/steps"
  run int8-2k $steps --precision int8 --cases 2k --recompute none --tokens 4608
  run int8-8k $steps --precision int8 --cases 8k --recompute mlp --tokens 16896
  LIMIT=420 with_vllm run vllm benchmarks.end_to_end rollout-vllm --out $out/steps
  run transformers benchmarks.end_to_end train-transformers --sequences 32 --out $out/steps
  python3 -m benchmarks.end_to_end table $out/steps
  run fp8-2k $steps --precision fp8 --cases 2k --recompute none --tokens 6912
}
$1; [ $1 = timings ] || touch /tmp/checked
