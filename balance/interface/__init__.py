"""What commands and pages share: options, error lines, Ctrl-C, the HTML document."""
