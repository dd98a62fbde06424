"""An HTTP server for one model, with the interface of OpenAI's API: completions, chat, streaming."""
