"""What a person sees of a step: charts and traces, predicted and measured side by side."""
