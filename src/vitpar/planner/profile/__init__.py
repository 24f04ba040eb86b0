"""What a machine and a model cost, as records: measured, estimated from data sheets, or imported; kept as JSON."""
