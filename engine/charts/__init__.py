"""Charts of simulated and measured steps: Gantt charts as HTML, traces for Perfetto."""
