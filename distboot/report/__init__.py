"""The report of a job: what rank 0 has seen of it, as JSON or as one HTML file that needs nothing else.

`history` is what the roll call has seen, `content` puts it together with what became of the ranks as plain JSON types,
`page` draws that (`headline`, `grid`, `timeline`), and `files` writes it. The page knows no more than the JSON does.
"""
