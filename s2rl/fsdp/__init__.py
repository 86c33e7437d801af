"""The policy learner: one FSDP2-sharded model, trained, scored, published and saved by `Learner`, one per rank."""
