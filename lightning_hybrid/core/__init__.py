"""Pure decisions: numbers and records in, records out."""
