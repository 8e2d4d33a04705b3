"""What a run leaves for people: accounting, summary.json and report.html.

Everything is computed from the tapes in the exchange, the commits there, and
what the launcher and the evaluator wrote into the workdir.
"""
