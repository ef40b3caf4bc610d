# Any call of a sitting (README.md), `jobs.sh SECONDS`: begins the scripts of .carry/jobs/*.sh that have not begun, each in a session of its own
# and in a copy of the tree as this call brought it ($LIVE, first on Python's path), waits so many seconds, and keeps what there is: their
# logs, /tmp/results, which is theirs, and the proof's rows and logs.  A script says what it waits for (`until [ -e /tmp/jobs/other.done ]`).
. experiments/sitting/environment.sh
mkdir -p /tmp/jobs /tmp/results
new=(); for job in .carry/jobs/*.sh; do name=$(basename "$job" .sh); [ -e "$job" ] && [ ! -e "/tmp/jobs/$name.log" ] && new+=("$name"); done
if [ ${#new[@]} -gt 0 ]; then
  export LIVE=/tmp/live.$(date +%s); mkdir -p "$LIVE"; tar cf - --exclude=./.carry . | tar xf - -C "$LIVE"
  for name in "${new[@]}"; do
    { cat experiments/sitting/environment.sh; echo 'export PYTHONPATH=/tmp/site:$LIVE/src:$LIVE CUDA_MPS_PIPE_DIRECTORY=/tmp/none'
      cat ".carry/jobs/$name.sh"; echo "since 'ended'; touch /tmp/jobs/$name.done"; } > "/tmp/jobs/$name.sh"
    (cd "$LIVE" && setsid bash "/tmp/jobs/$name.sh" > "/tmp/jobs/$name.log" 2>&1 < /dev/null &)
  done
fi
sleep "${1:-35}"; since now; nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
for log in /tmp/jobs/*.log; do echo "== $log"; tail -n 2 "$log" | cut -c 1-300; done
cd /tmp && tar c jobs results $(ls -d proof/rows proof/*.log proof/runs/*.log proof/runs/*/metrics.jsonl proof/start*/start.json 2> /dev/null) 2> /dev/null \
  | xz -2 -T0 > kept.part && cp kept.part "$OUT/kept.txz"
