"""The papers' tables, simulated: a module per paper and subject, put together by
benchmarks/paper_tables.py.
"""
