# A hub in a container, with TLS of its own. Untested.
# Clips need user namespaces, which most container engines forbid: the hub then says at its start that clips are off.
#
#   docker build -f hub.Dockerfile -t hub . && docker run -p 443:8443 -v hub:/data -v /etc/hub:/tls:ro hub
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends ffmpeg util-linux && rm -rf /var/lib/apt/lists/*
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir "$(ls /tmp/shoestring-*.whl)[hub,postgresql]" && useradd --uid 1000 hub && install -d -o hub -m 700 /data
USER hub
CMD ["shoestring", "hub", "serve", "/data/hub", "--name", "hub.example.org", "--host", "0.0.0.0", "--port", "8443", \
     "--certificate", "/tls/cert.pem", "--key", "/tls/key.pem"]
