"""EXECUTOR: carries a step's decision to the workers and brings back what they sampled."""
