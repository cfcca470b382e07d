"""Policies for other programs: safetensors with named layers, ONNX and PyTorch."""
