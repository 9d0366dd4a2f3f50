"""What quarflow costs, and against what: ``python -m benchmarks.NAME`` writes ``results/NAME.json``."""
