"""Supervised training: a policy on demonstrations, a reward model on preferences, by TRL's trainers."""
