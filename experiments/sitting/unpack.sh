# The first call of a sitting (README.md): the tree and what it lacks, outside of the copy that each call brings anew.
. experiments/sitting/environment.sh
date +%s > $BEGUN; mkdir -p $TREE $PROOF/data $PROOF/rows $CARRIED /tmp/caches
cp .carry/base/* $CARRIED/; tar cf - --exclude=./.carry . | tar xf - -C $TREE; cd $TREE || exit 1
tar xJf $CARRIED/site.txz -C /tmp; tar xJf $CARRIED/gsm.txz -C $PROOF/data
[ -e $CARRIED/ladder.txz ] && tar xJf $CARRIED/ladder.txz -C $PROOF/data
ls $CARRIED/caches.txz.* > /dev/null 2>&1 && cat $CARRIED/caches.txz.* | tar xJf - -C /tmp
cp experiments/results/proof/*.json.xz $PROOF/rows/ 2>/dev/null; mkdir -p $PROOF/rows/starts; cp experiments/results/proof/starts/*.json.xz $PROOF/rows/starts/
python3 - $PROOF/data <<'P'
import sys
from pathlib import Path
from experiments.proof.suite import SIZES, rows_of, write_lines
for split, size in SIZES.items():
    write_lines(Path(sys.argv[1]) / f"multiply.{split}.jsonl", rows_of("multiply", split, size))
P
(cd $PROOF/data && sha256sum --quiet -c $CARRIED/problems.sha256) && since unpacked
