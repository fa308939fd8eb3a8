"""Cost models: how long a step takes, one file each, behind `seconds(StepWork)` (engine_core/executor/modelled.py)."""
