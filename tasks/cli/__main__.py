from tasks.cli import app

app(prog_name="rlflow")
