# Half an hour of one card: whole steps of 8B in the default flow beside vLLM and transformers, then guesses of small models, ragged rollouts and tests.
# vLLM 0.25.1 and what it imports travel in three parts, each of which fits beside the tree in 64 MiB: .carry/vllm-a has the wheels (whl), vllm-b an
# archive of its Python (vllm_py.tar.xz) and the first 20 MB of that of its library (vllm_C.tar.xz.aa, by `split -b 20M`), vllm-c the rest.  Six calls:
#   .carry/base     bash experiments/sitting/unpack.sh; setsid bash experiments/sitting/whole_steps.sh > /tmp/queue.log 2>&1 < /dev/null &
#                   sleep 20; tail /tmp/queue.log
#   .carry/vllm-a   mkdir -p /tmp/vllm; cp -r .carry/vllm-a/* /tmp/vllm/, and the same of b and c; the last also: touch /tmp/vllm/whole
#   .carry/base     bash experiments/sitting/wait.sh 585, twice or until it has ended
# Tests, starts and vLLM's installation share the card; then each timing has it alone; tests fill what is left.
. experiments/sitting/environment.sh
cd $TREE || exit 1; export CUDA_MPS_PIPE_DIRECTORY=/tmp/none; out=/tmp/whole/rows; mkdir -p $out
# PRECISION CASE RECOMPUTE TOKENS: fewer tokens a micro-batch where more do not fit; the row says so.
steps() {
  precision=$1 case=$2 recompute=$3 several=$4; shift 4
  for tokens in $several; do
    run native-$precision-$case-$tokens-${2:-default} benchmarks.end_to_end native --precision $precision --cases $case --recompute $recompute \
      --tokens $tokens --out $out/steps "$@" && ! tail -n 1 $out/steps/native-$precision-*.jsonl | grep -q '"error"' && break
  done
}
tests() {  # BACK_END LIMIT FILES
  timeout -s INT -k 20 $2 python3 -m pytest -q -n 5 -p no:cacheprovider --timeout 240 --tb short -rf --back-end $1 $3 > $out/tests-$1-$2.log 2>&1
  since "tests, $1: $?"; tail -n 3 $out/tests-$1-$2.log
}
start() { python3 -m experiments.proof ladder $PROOF --size $1 -- --rollout.kv_memory_gib 8 --checkpoint.every 0 > $out/start-$1.log 2>&1; since "$1: $?"; }
guesses() { run guesses-$1-$2 benchmarks.speculation --precision int8 --repeats 6 --folder $PROOF/start-$1/model --prompts $PROOF/data/$2.train.jsonl; }
named() { for one in "$@"; do echo tests/gpu/test_$one.py; done; }
# First what samples, with guesses, as is the default; then what has not run since attention sums in parts of 2,048 keys.
ENGINES=$(named drafts exactness replay repeat resume trainer reference shared_prefix)
REST=$(named gemm linear_backward int8_backward quantise publish sampling log_prob token_log_probs_backward qkv_backward norm_backward lora loading memory \
  out_of_memory scorer scalar_head training experts bisect calibration reward_model tokenizer_size threads adamw embedding_backward)
tests hopper 180 "$ENGINES $REST" & shared+=($!); tests triton 180 "$REST" & shared+=($!)
start 27m & shared+=($!); start 108m & shared+=($!)
wait "${shared[@]}"
install_vllm
run prewarm benchmarks.prewarm
steps int8 2k none "4608"
steps fp8 2k none "6912 4608"
steps int8 8k mlp "16896 8448" --speculation 0
steps fp8 8k mlp "16896 8448"
LIMIT=480 with_vllm run vllm benchmarks.end_to_end rollout-vllm --cases 2k --out $out/steps
LIMIT=420 run transformers benchmarks.end_to_end train-transformers --cases 2k --sequences 32 --out $out/steps
python3 -m benchmarks.end_to_end table $out/steps
for size in 27m 108m; do for task in multiply gsm; do guesses $size $task; done; done
LIMIT=200 run ragged benchmarks.rollout native --precision int8 --cases ragged --out $out/native
LIMIT=200 run ragged-alone benchmarks.rollout native --precision int8 --cases ragged --speculation 0 --out $out/native
for size in 27m 108m; do run verify-$size isobit.cli.main verify $PROOF/start-$size/model --back_end hopper; tail -n 2 $out/verify-$size.jsonl; done
# Last what the first minutes left: with guesses, as is the default.
tests hopper 500 "$ENGINES"
touch /tmp/queue.ended
