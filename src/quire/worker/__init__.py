"""Workers: the only place that imports torch. Nobody imports this room but the executor, and only inside functions."""
