# A queue that makes runs (README.md), `runs.sh TASK:ARM:SEED[:again] ..`: JOBS (6) at once on each of CARDS (0) where
# they share a card (share.sh), else two.  What
# fails while they share it, or hangs, goes on without.  None begins that would not end: one needs NEEDS seconds (600: of gsm one took 460
# where the others ended, one 700 beside five; multiply needs 1,350, so it comes first).  KEEP seconds at the end are left for what the queue does next.
. experiments/sitting/environment.sh
mkdir -p $PROOF/runs; MORE=${MORE:---rollout.kv_memory_gib 5}
left() { echo $(( ${HELD:-1690} - $(date +%s) + $(cat $BEGUN) )); }
lines() { cat $PROOF/runs/*/metrics.jsonl 2> /dev/null | wc -l; }
make() {
  local until=$(( $(left) - ${KEEP:-0} )) jobs=$1; shift
  python3 -m experiments.proof run $PROOF --runs "$@" --cards ${CARDS:-0} --jobs $jobs --seconds $until --begin-within $(( until - ${NEEDS:-600} )) -- $MORE
  since "runs, $jobs at once, ended with $?"
}
unshare() { rm -f /tmp/shared; echo quit -t 1 | timeout 10 nvidia-cuda-mps-control; pkill -9 -f nvidia-cuda-mps; pkill -9 -f isobit.cli.main; }
watch() {
  local seen=0 still=0 now
  while sleep 10; do
    now=$(lines); [ $now -gt $seen ] && still=0 || still=$(( still + 10 )); seen=$now
    [ $still -ge 200 ] && { since "no line in $still s"; unshare; return; }
  done
}
say() { while sleep 50; do echo "lines $(lines), tracebacks $(cat $PROOF/runs/*.log 2> /dev/null | grep -c Traceback), $(left) s left, $(nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader)"; done; }
for turn in $(seq 60); do grep -q compiled /tmp/warm.log && break; sleep 1; done
grep failed /tmp/warm.log && unshare
say & saying=$!
if [ -e /tmp/shared ]; then
  watch & watching=$!
  make ${JOBS:-6} "$@" | tee /tmp/shared.log
  kill $watching
  grep -q failed /tmp/shared.log && [ $(left) -gt $(( ${KEEP:-0} + 400 )) ] && { unshare; make 2 "$@"; }
  unshare 2> /dev/null
else
  make 2 "$@"
fi
kill $saying
