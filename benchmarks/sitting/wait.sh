# A further call of a sitting (README.md): wait so many seconds, or for the end of the queue; say how far all is, keep what there is.
. benchmarks/sitting/environment.sh
[ -d $TREE ] || { echo "the machine was given back"; exit 9; }
cd $TREE || exit 1; until=$(( $(date +%s) + $1 ))
while [ "$(date +%s)" -lt $until ] && [ ! -e /tmp/queue.ended ]; do sleep 1; done
tail -n 30 /tmp/queue.log; python3 -m benchmarks.proof look $PROOF; nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
cd /tmp && tar c $(ls -d proof/rows proof/flows proof/runs/*.log proof/runs/*/metrics.jsonl ./*.log 2>/dev/null) | xz -3 -T0 > "$OUT/kept.txz"
[ -e /tmp/caches.kept ] || { tar c caches | xz -3 -T0 > "$OUT/caches.txz"; touch /tmp/caches.kept; }
since waited
