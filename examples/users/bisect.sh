# For `git bisect run sh bisect.sh`. `ref` is a dump of a good commit, outside of what git changes.
driftline dump -o cand --force --log-level error -- python infer.py || exit 125
driftline compare ref cand --bisect-exit --quiet
