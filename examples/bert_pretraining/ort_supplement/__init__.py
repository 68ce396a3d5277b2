"""What a pre-training script needs to run on ORTTrainer."""
