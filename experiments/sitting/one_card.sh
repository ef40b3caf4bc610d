# A session of 30 minutes on one card: three calls sent at once, each with .carry/base, of which the first is
#   bash experiments/sitting/unpack.sh; setsid bash experiments/sitting/one_card.sh > /tmp/queue.log 2>&1 < /dev/null &
#   bash experiments/sitting/wait.sh 520
# and the others `bash experiments/sitting/wait.sh 585`.  Tests and the start of 443m share the card; then each timing has it alone; then verify, two at a time.
. experiments/sitting/environment.sh
cd $TREE || exit 1; export CUDA_MPS_PIPE_DIRECTORY=/tmp/none; out=/tmp/one_card/rows; mkdir -p $out
rows() { name=$1; shift; timeout ${LIMIT:-200} python3 -m "$@" > $out/$name.jsonl 2> $out/$name.log; since "$name: $?"; }
FIRST="attention exactness drafts int8 kv_cache shared_prefix attention_backward qkv reference repeat replay resume trainer delta_rule"  # what calls attention
tests() {
  timeout -s INT -k 20 ${LIMIT:-540} python3 -m pytest -q -n 6 -p no:cacheprovider --timeout 240 --tb short -rf --back-end $1 \
    $({ printf 'tests/gpu/test_%s.py\n' $FIRST; ls tests/gpu/test_*.py; } | grep -vE "ranks|peer_copies|tensor_parallel" | awk '!seen[$0]++') \
    > $out/tests-$1.log 2>&1; since "tests, $1: $?"; tail -n 3 $out/tests-$1.log
}
guesses() { name=$1; shift; rows guesses-$name benchmarks.speculation --precision int8 --repeats ${REPEATS:-6} "$@"; }
verify() {
  for one in "$@"; do
    IFS=: read -r shape flow longest <<< $one
    LIMIT=150 rows verify-$shape-$flow isobit.cli.main verify --shape $shape --precision $flow --longest $longest --back_end hopper; tail -n 2 $out/verify-$shape-$flow.jsonl
  done
}
for one in 0 1; do python3 -m benchmarks.tiles decode --formats int8 --keys 512 --in-use --sequences 256 --compile $one/2 > /dev/null 2>&1 & compiled+=($!); done
wait "${compiled[@]}"; since compiled
tests hopper & tested+=($!); tests triton & tested+=($!)
python3 -m experiments.proof ladder $PROOF --size 443m -- --rollout.kv_memory_gib 16 --checkpoint.every 0 > $out/start.log 2>&1; since "443m: $?"
wait "${tested[@]}"
rows prewarm benchmarks.prewarm
guesses multiply --folder $PROOF/start-443m/model --prompts $PROOF/data/multiply.train.jsonl
guesses gsm --folder $PROOF/start-443m/model --prompts $PROOF/data/gsm.train.jsonl
LIMIT=300 rows ragged benchmarks.rollout native --precision int8 --cases ragged,long --out $out/native
rows order benchmarks.order --mode int8
REPEATS=2 guesses 8b --shape qwen3-8b --replay 0.7
rows even benchmarks.tiles decode --formats int8 e4m3 bf16 --keys 512 --in-use --sequences 256
rows uneven benchmarks.tiles decode --formats int8 e4m3 bf16 --keys 512 --longest 8192 --in-use --sequences 256
verify qwen3-8b:int8:8192 qwen3-8b:fp8:4096 qwen3-30b-a3b:int8:2048 & lanes+=($!)
verify qwen3-8b:bf16:4096 gemma-3-4b:int8:2048 gpt-oss-20b:int8:2048 qwen3.5-9b:int8:2048 & lanes+=($!)
wait "${lanes[@]}"
touch /tmp/queue.ended
