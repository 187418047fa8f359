"""FlashInfer's norm."""
