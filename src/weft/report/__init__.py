"""What a run looked like: its pipeline as a picture and as a trace. Text made of plain data; no torch needed."""
