"""Plans, executes and evaluates trials. Runs in its own environment and imports no deep-learning framework.

plan ──► environments ──► execute ──► records ──► statistics ──► report
"""
