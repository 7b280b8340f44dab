#!/usr/bin/env bash
# Fuzzes what is parsed off the network, on stable Rust without cargo-fuzz:
#   rust/fuzz/run.sh SECONDS [header|manifest|digests|request|proof|answer|address|index ...]
# With FUZZ_RUNS=10000000 each target ends after so many inputs instead.
# Ends with an error if a target finds a crash; the input then lies in artifacts/.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:?usage: run.sh SECONDS [target ...]}
shift
[ $# -gt 0 ] || set -- header manifest digests request proof answer address index

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
# the flags cargo-fuzz sets, less the sanitizers, which need nightly
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
coverage+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
coverage+=" -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing"
# The build gives way to tests that run beside it.
# with a target named, the flags stay away from build scripts and proc macros
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="$coverage" nice -n 15 cargo build --release --locked --target "$host" $(printf -- '--bin %s ' "$@")

seed() { # TARGET NAME TEXT (printf escapes)
    mkdir -p "corpus/$1"
    [ -e "corpus/$1/$2" ] || printf "$3" >"corpus/$1/$2"
}
seed header empty '{}   '
seed header two '{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]},"a\\n\\u00e4":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
seed header packed '{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},"z":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"s":{"dtype":"F6_E2M3","shape":[1,4],"data_offsets":[2,5]}}'
seed manifest small '{"version":1,"tree":0,"flags":"","objects":0,"storages":[]}'
seed manifest nodes '{"version":1,"tree":{"a":["o",{"w":0,"b":1}],"s":["d","d",[[0,2],["x",-1],[["t",1.5,["r",0]],["l",["t"]]]]],"n":["n",0,1],"p":["a",0,2]},"flags":"013","objects":1,"storages":[[20,[[5,0],[6,12]]],[0,[]]],"shards":{"a":{"global":[4]}}}'
seed digests empty 'TFDIGST1\1\0\0\0\0\0\020\0\0\0\0\0\0\0\0\0\1\2\3\4\5\6\7\10\0\0\0\0\0\0\0\0'
seed digests one 'TFDIGST1\1\0\0\0\0\0\020\0\7\0\0\0\0\0\0\0\1\2\3\4\5\6\7\10\1\0\0\0\0\0\0\0\1\2\3\4\5\6\7\10'
seed digests keyed 'TFDIGST1\2\0\0\0\0\0\020\0\7\0\0\0\0\0\0\0\1\2\3\4\5\6\7\10\1\0\0\0\0\0\0\0\1\2\3\4\5\6\7\10'
seed index empty 'TFINDEX1\1\0\0\0'
seed proof field 'Tensorferry 000102030405060708090a0b0c0d0e0f.'
seed request container '\144\0\0\0\0\0\0\0/checkpoint/12.safetensors?x'
seed request chunk '\144\0\0\0\0\0\0\0/checkpoint/007/-3'
seed request range '\144\0\0\0\0\0\0\0bytes=10-19'
seed request suffix '\144\0\0\0\0\0\0\0bytes=-5'
seed request answer '\144\0\0\0\0\0\0\0bytes 0-499/1234'
seed request tags '\144\0\0\0\0\0\0\0W/"x", "a"'
seed request blocks '\144\0\0\0\0\0\0\0blocks=3-17'
seed request grain '\144\0\0\0\0\0\0\0blocks=3-17&grain=65536'
seed request runs '\144\0\0\0\0\0\0\0blocks=3-17,19-20&grain=512'
seed answer part 'aHTTP/1.1 206 OK\r\nContent-Length: 5\r\nContent-Range: bytes 0-4/5\r\nETag: "a"\r\n\r\nhelloHTTP/1.1 200 OK\r\nContent-Length: 0\r\nTensorferry-Proof: 00\r\n\r\n'
seed answer interim 'aHTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 not found\r\nConnection: close\r\nContent-Length: 10\r\n\r\nnot found\n'
seed answer open 'bHTTP/1.1 206 OK\r\nContent-Length: 16\r\nContent-Range: bytes 0-15/16\r\nETag: "a"\r\n\r\n\010\0\0\0\0\0\0\0{}      HTTP/1.1 200 OK\r\nContent-Length: 40\r\nETag: "a"\r\n\r\nTFDIGST1\1\0\0\0\0\0\020\0\0\0\0\0\0\0\0\0\1\2\3\4\5\6\7\10\0\0\0\0\0\0\0\0'
seed address plain 'http://[::1]:80/0f/checkpoint/'
seed address pinned 'https://sha256-ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad@node-7:4000/0f/checkpoint/'

cat >corpus/json.dict <<'DICT'
"{\""
"\":"
"\\u00"
"\"__metadata__\":"
"\"dtype\":\"U8\""
"\"shape\":["
"\"data_offsets\":["
"[\"l\","
"[\"o\",{"
"[\"d\",\"d\",[["
"[\"n\",0,"
"[\"r\",0]"
"\"storages\":[["
"HTTP/1.1 206 OK\x0d\x0a"
"Content-Range: bytes "
"Content-Length: "
"\x0d\x0a\x0d\x0a"
"https://sha256-"
"blocks="
"&grain=4096"
DICT

fuzz() { # TARGET
    mkdir -p "artifacts/$1"
    limit="-max_total_time=$seconds"
    [ -z "${FUZZ_RUNS:-}" ] || limit="-runs=$FUZZ_RUNS"
    status=0
    told=$("$CARGO_TARGET_DIR/$host/release/$1" "corpus/$1" -dict=corpus/json.dict \
        "$limit" -rss_limit_mb=1024 -timeout=10 -max_len=4096 \
        -print_final_stats=1 -verbosity=0 -artifact_prefix="artifacts/$1/" 2>&1) || status=$?
    printf '== %s %s\n%s\n' "$1" "$limit" "$told"
    return $status
}
export -f fuzz
export seconds host
# Two at a time; xargs ends with an error if one does.
printf '%s\n' "$@" | xargs -P 2 -I TARGET bash -c 'fuzz TARGET'
