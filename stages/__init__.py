"""The four stages of the pipeline, one module each: settings in, library calls, output. No logic of their own."""
