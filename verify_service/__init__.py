"""The verifier: owns the target model, the KV cache, the scheduler and verification. Decides every output token."""
