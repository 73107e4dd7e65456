#!/bin/bash
# Installs and starts the agent; runs as root at every boot, idempotent.

# First of all: whatever fails below, an instance without a running agent for so long ends itself.
touch /run/sailor-alive
systemd-run --quiet --unit=sailor-alone --on-active=60 --on-unit-active=60 /bin/sh -c \
    'systemctl is-active --quiet sailor-agent && touch /run/sailor-alive
     [ -n "$(find /run/sailor-alive -mmin -@ALONE_MIN@)" ] || systemctl poweroff' || true
set -euo pipefail

metadata() {
    curl -sSf --retry 10 --retry-all-errors -H 'Metadata-Flavor: Google' \
        "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/$1"
}

# Names of Python differ between images; Debian and Ubuntu package venv separately.
is_new() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
makes_venvs() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
find_python() {
    local name newest=''
    for name in python3.13 python3.12 python3.11 python3; do
        is_new "$name" || continue
        newest=${newest:-$name}
        makes_venvs "$name" && echo "$name" && return
    done
    [[ -n $newest ]] || { echo 'this image has no Python 3.11 or later: name another as image' >&2; return 1; }
    { apt-get -qq update && apt-get -qq -y install "$newest-venv"; } >&2 || true
    makes_venvs "$newest" || { echo "$newest of this image has no venv: install $newest-venv in it" >&2; return 1; }
    echo "$newest"
}

# Downloads a wheel from a bucket with the instance's own service account, checks it, and names the
# copy. Bash ignores `set -e` in a substitution, so each step says what a failure means.
fetch_wheel() {
    local address=${1#*gs://} sum=${1##*#sha256=} token wheel
    address=${address%%#*}
    wheel="$2/${address##*/}"
    token=$(metadata service-accounts/default/token | python3 -c 'import json, sys; print(json.load(sys.stdin)["access_token"])') || return 1
    curl -sSf --retry 10 --retry-all-errors -H "Authorization: Bearer $token" \
        -o "$wheel" "https://storage.googleapis.com/$address" || return 1
    echo "$sum  $wheel" | sha256sum --check --quiet >&2 || return 1
    echo "${1%%gs://*}file://$wheel"
}

# Pinned, so a second boot installs nothing. torch first, in a call of its own.
if [[ -n '@PACKAGE@' && "$(cat /opt/sailor/.package 2>/dev/null || true)" != '@PACKAGE@' ]]; then
    python=$(find_python)
    "$python" -m venv /opt/sailor
    package='@PACKAGE@'
    if [[ $package == *gs://* ]]; then
        package=$(fetch_wheel "$package" /opt/sailor)
    fi
    /opt/sailor/bin/pip install --quiet --retries 10 '@TORCH@'
    /opt/sailor/bin/pip install --quiet --retries 10 "$package"
    /opt/sailor/bin/pip install --quiet --retries 10 'gcsfs>=2026.7'
    echo '@PACKAGE@' >/opt/sailor/.package
fi
[[ -x /opt/sailor/bin/sailor-agent ]] || { echo 'this image has no agent in /opt/sailor' >&2; exit 1; }

id sailor >/dev/null 2>&1 || useradd --system --home-dir /var/lib/sailor-agent --shell /usr/sbin/nologin sailor
id sailor-worker >/dev/null 2>&1 || useradd --system --user-group --home-dir /var/lib/sailor-worker --shell /usr/sbin/nologin sailor-worker
install -d -m 0755 /etc/sailor

# The key is not in the metadata, which everyone who may list instances can read.
token=$(metadata service-accounts/default/token | python3 -c 'import json, sys; print(json.load(sys.stdin)["access_token"])')
curl -sSf --retry 10 --retry-all-errors -H "Authorization: Bearer $token" \
    'https://secretmanager.googleapis.com/v1/@KEY_SECRET@:access' |
    python3 -c 'import base64, json, sys; sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["payload"]["data"]))' |
    install -o sailor -m 0600 /dev/stdin /etc/sailor/cluster.key

zone=$(metadata zone)
cat >/etc/sailor/agent.toml <<END
cluster_name = "@CLUSTER@"
name = "$(metadata name)"
state = "/var/lib/sailor-agent"
store = "@STORE@"
key = "cluster.key"
memory = "/dev/shm/sailor-agent"
worker_folder = "/var/lib/sailor-worker"
zone = "${zone##*/}"
machine = "@MACHINE@"
spot = @SPOT@
notice_s = @NOTICE_S@
shutdown_s = @SHUTDOWN_S@
alone_s = @ALONE_S@

[listen]
host = "0.0.0.0"
port = 7078
address = "$(metadata network-interfaces/0/ip):7078"

@MOUNTS@
@TLS@
END
cat >/etc/sailor/ca.pem <<'END'
@CA@
END

# The same units as on machines of one's own.
cat >/etc/systemd/system/sailor-agent.service <<'END'
@UNIT@
END
cat >/etc/systemd/system/sailor-worker.service <<'END'
@WORKER_UNIT@
END
install -D -m 0755 /dev/stdin /usr/lib/sailor/tell-shutdown <<'END'
@TELL_SHUTDOWN@
END
systemctl daemon-reload
systemctl enable --now --no-block sailor-agent
