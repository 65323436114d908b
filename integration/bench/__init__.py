"""The benchmark: our publishers and consumers beside their peers, in one run, against one broker.

``python -m integration.bench --help`` says what it can do. A contender is a module in `integration.bench.contenders`;
adding a file there adds it to the run, the table, the bars and the plot.
"""
