# One store node; docs/operations.md has the commands ("In a container"). The image holds the locked packages
# and the wheel, nothing to build with.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements/server.lock requirements/server.lock
RUN python -m venv /opt/sdstore \
    && /opt/sdstore/bin/pip install --no-cache-dir --require-hashes -r requirements/server.lock
COPY . .
RUN /opt/sdstore/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin sdstore \
    && install --directory --owner=sdstore --group=sdstore /data
COPY --from=build /opt/sdstore /opt/sdstore
ENV PATH=/opt/sdstore/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SDSTORE_DATA_DIR=/data \
    SDSTORE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
# /readyz says no while the database is out of reach or the disk is full.
# The certificate of a node that serves https is not for this address; nothing secret is sent.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["sh", "-c", "for scheme in http https; do python -c 'import ssl, sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=2, context=ssl._create_unverified_context())' $scheme://127.0.0.1:${SDSTORE_PORT:-8000}/readyz 2>/dev/null && exit 0; done; exit 1"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["sdstore"]
CMD ["serve"]
