# A further call of a sitting (README.md): wait so many seconds, or for the end of the queue; say how far all is, keep what there is.  Rows and
# logs are kept each minute, too: a call that is ended before it is over still brings them back.  Caches are kept with CACHES=1: that takes a minute.
. experiments/sitting/environment.sh
[ -d $TREE ] || { echo "the machine was given back"; exit 9; }
[ -e /tmp/queue.log ] || { echo "no queue was begun"; exit 9; }
keep() { (cd /tmp && tar c $(ls -d */rows */flows */runs/*.log */runs/*/metrics.jsonl ./*.log 2>/dev/null) | xz -3 -T0 > kept.part && cp kept.part "$OUT/kept.new" && mv "$OUT/kept.new" "$OUT/kept.txz"); }
cd $TREE || exit 1; until=$(( $(date +%s) + $1 )); kept=$(date +%s)
while [ "$(date +%s)" -lt $until ] && [ ! -e /tmp/queue.ended ]; do
  sleep 1; [ $(( $(date +%s) - kept )) -lt 60 ] || { keep; kept=$(date +%s); }
done
tail -n 30 /tmp/queue.log; python3 -m experiments.proof look $PROOF; nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
keep
# Of Triton's kernels what it reads to load them: 2 MB in the place of 10.
[ "${CACHES:-0}" = 0 ] || tar c -C /tmp --exclude='*.'{ptx,ttir,ttgir,llir,source} caches | xz -6 -T0 | split -b 15M - "$OUT/caches.txz."
since waited
