"""The model room: frozen foundations, LoRA, the routed backbone, decoders, the network."""
