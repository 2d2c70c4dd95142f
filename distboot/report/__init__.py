"""The report of a job: what rank 0 has seen of it, as JSON or as one HTML file that needs nothing else.

`history` is what the roll call has seen, and `steps` what the ranks say of their start; `content` puts it together with
what became of them as plain JSON types; `page` draws that (`grid`, `timeline`; `markup` and `style` are how); `files`
writes it. The page knows no more than the JSON does.
"""
