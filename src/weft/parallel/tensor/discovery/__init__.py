"""Discovery: how an ordinary model splits over the tensor axis, found from the flow of data between its layers."""
