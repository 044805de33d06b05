"""What is refused: types and shapes of arguments, values of index tensors, DTensors that are no whole tensors."""
