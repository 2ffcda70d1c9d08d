#!/bin/bash
# Send large files to a machine without a network that takes little in one call.
#   bash eval/in_parts.sh cut FILE...      # here: into parts of PART (50M) and a checksum, in .parts/, which git ignores
#   bash eval/in_parts.sh join FOLDER      # there, in each call: moves what has come in .parts/ to FOLDER, and joins and
#                                          # checks the files whose checksum has come; send that one last
set -euo pipefail
case ${1:-} in
cut)
    mkdir -p .parts
    for file in "${@:2}"; do
        name=$(basename "$file")
        split -d -a 3 -b "${PART:-50M}" "$file" ".parts/$name."
        (cd "$(dirname "$file")" && sha256sum "$name") >".parts/$name.sha256"
    done
    du -h .parts/*;;
join)
    mkdir -p "${2:?a folder}"
    find .parts -type f -exec mv -t "$2" {} +
    cd "$2"
    for checksum in *.sha256; do
        [ -e "$checksum" ] || continue
        name=${checksum%.sha256}
        cat "$name".[0-9][0-9][0-9] >"$name"
        sha256sum -c "$checksum" && rm "$name".[0-9][0-9][0-9] "$checksum"
    done;;
*) echo "cut or join, got: ${1:-nothing}"; exit 2;;
esac
