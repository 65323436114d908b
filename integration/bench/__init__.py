"""The benchmark: our publishers and consumers, and others, on one broker.

All are measured in one run. ``python -m integration.bench --help`` lists the options. A contender is a module in
`integration.bench.contenders`; adding a file there adds it to the run, the table, the bars and the plot.
"""
