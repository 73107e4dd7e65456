"""Run several planners on one case and judge their plans with one simulator."""
