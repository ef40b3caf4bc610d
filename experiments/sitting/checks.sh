# GPU tests of both back ends and checks by commands, beside or in place of a queue (README.md): begun behind unpack.sh on cards that nothing else
# uses, `CARDS="0 1 2 3" setsid bash experiments/sitting/checks.sh > /tmp/checks.log 2>&1 < /dev/null &`.  The last two cards have the tests of
# several GPUs first; on one card (`CARDS=0`) they are left out.  wait.sh keeps the logs.  On four H200s all but those tests ended in 330 s, without kept kernels.
. experiments/sitting/environment.sh
cd $TREE || exit 1; export CUDA_MPS_PIPE_DIRECTORY=/tmp/none KEY=secret; cards=(${CARDS:-0 1 2 3}); touch /tmp/queue.log
isobit() { python3 -m isobit.cli.main "$@"; }
tests() { timeout -s INT -k 20 ${LIMIT:-900} python3 -m pytest -v -p no:cacheprovider --timeout 240 --tb short -rf "$@"; since "exit status $?"; }
SEVERAL="tests/gpu/test_ranks.py tests/gpu/test_peer_copies.py tests/gpu/test_tensor_parallel.py"
one_card() { ls tests/gpu/test_*.py | grep -vF "$(tr ' ' '\n' <<< $SEVERAL)"; }
by_commands() {
  isobit doctor; since "doctor: $?"
  for one in qwen3-8b:int8:triton qwen3-8b:bf16:triton qwen3-8b:fp8:triton olmo2-1b:int8:hopper smollm3-3b:int8:hopper \
    gemma-3-4b:int8:hopper gpt-oss-20b:int8:hopper gemma-3-4b:int8:triton gpt-oss-20b:int8:triton; do
    IFS=: read -r shape flow back_end <<< $one
    timeout 200 python3 -m isobit.cli.main verify --shape $shape --precision $flow --longest 2048 --back_end $back_end; since "$one: $?"
  done
}
by_server() {
  mkdir -p /tmp/pushed; isobit serve starter --device cuda --port 8123 --api-key env:KEY --allow-weight-updates /tmp/pushed --precision int8 & sleep 25
  isobit train recipes/quickstart.toml --device cuda --async.max_staleness 2 --rollout.engine http --rollout.servers '["http://127.0.0.1:8123"]' \
    --rollout.server_key env:KEY --output /tmp/free; since "trained: $?"; isobit replay /tmp/free; since "replayed: $?"; kill %%
}
by_rollouters() {
  isobit train recipes/quickstart.toml --device cuda --async.max_staleness 2 --cluster.processes 2 --cluster.rollouters 1 --output /tmp/apart
  since "trained: $?"; isobit replay /tmp/apart; since "replayed: $?"
}
small_cards() {
  for one in "qwen3-8b mlp 4096 bf16 --lora-rank 32" "qwen3-8b full 4096 bf16 --lora-rank 32" "qwen3-1.7b full 1024 fp8"; do
    set -- $one
    python3 -m benchmarks.memory measure --shape $1 --precision int8 --recompute $2 --tokens $3 --length $3 --moments $4 "${@:5}" \
      --limit-gib 22.5 --back-end triton --out /tmp/portable/small; since "$one: $?"
  done
  tail -n +1 /tmp/portable/small/*
}
hybrids() {  # OLDER is another tree, where its kernels are to be compared
  python3 -m benchmarks.delta_rule ${OLDER:+--against $OLDER/src} > /tmp/portable/delta-rule.jsonl; since "delta rule: $?"
  for shape in qwen3.5-9b qwen3-8b; do
    python3 -m benchmarks.rollout steps --precisions int8 --counts 1,32,256 --shape $shape --out /tmp/portable/hybrid
    python3 -m benchmarks.rollout native --precision int8 --cases prefill --shape $shape --out /tmp/portable/hybrid
    python3 -m benchmarks.training pass native int8:2048x4:none --shape $shape --out /tmp/portable/hybrid; since "$shape: $?"
  done
  tail -n +1 /tmp/portable/hybrid/* /tmp/portable/delta-rule.jsonl
}
sanitized() {  # where the machine has a sanitizer that takes the card; each allocation is one of CUDA's, so that what lies beside it is seen
  for tool in memcheck racecheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 20 ${SANITIZED:-240} compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 20 python3 -m pytest \
      -x -v -p no:cacheprovider --back-end triton tests/gpu/test_gemm.py tests/gpu/test_int8.py tests/gpu/test_attention.py tests/gpu/test_delta_rule.py
    since "$tool: $?"
  done
}
timings() {
  for one in hopper triton; do
    for flow in int8 bf16; do
      python3 -m benchmarks.rollout steps --precisions $flow --counts 32,256 --back-end $one --out /tmp/portable/$one
      python3 -m benchmarks.training pass native $flow:4096x2:none --back-end $one --out /tmp/portable/$one; since "$one, $flow: $?"
    done
  done
  tail -n +1 /tmp/portable/*/*
}
if [ ${#cards[@]} = 1 ]; then  # what takes a card's memory or time waits for the tests
  export CUDA_VISIBLE_DEVICES=${cards[0]}
  tests -n 7 $(one_card) > /tmp/hopper.log 2>&1 & tests -n 7 --back-end triton $(one_card) > /tmp/portable.log 2>&1; wait
  by_commands > /tmp/commands.log 2>&1; timings > /tmp/timings.log 2>&1; by_server > /tmp/server.log 2>&1
  for one in hybrids small_cards sanitized; do $one > /tmp/$one.log 2>&1; done; touch /tmp/queue.ended; exit
fi
(CUDA_VISIBLE_DEVICES=${cards[0]} tests -n 12 $(one_card) > /tmp/hopper.log 2>&1) &
(export CUDA_VISIBLE_DEVICES=${cards[1]}; for one in timings hybrids small_cards sanitized; do $one > /tmp/$one.log 2>&1; done) &
(CUDA_VISIBLE_DEVICES=${cards[2]},${cards[3]} tests -n 4 $SEVERAL > /tmp/several.log 2>&1
CUDA_VISIBLE_DEVICES=${cards[2]},${cards[3]} by_rollouters > /tmp/rollouters.log 2>&1
CUDA_VISIBLE_DEVICES=${cards[2]} tests -n 12 --back-end triton $(one_card) > /tmp/portable.log 2>&1) &
(export CUDA_VISIBLE_DEVICES=${cards[3]}; by_commands > /tmp/commands.log 2>&1; by_server > /tmp/server.log 2>&1) &
wait; touch /tmp/queue.ended
