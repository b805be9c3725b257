"""What the evaluation commands share: checkpoints, variants, results, tasks."""
