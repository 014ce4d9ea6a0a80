"""The parts of benchmarks/chaos.py: a stack to break, faults, load that knows the right answers,
and checks for leaks.
"""
