#!/usr/bin/env bash
# Builds the image of launch/Dockerfile from what git has committed, and prints its name as the last line:
#   bash launch/image.sh --image=REGISTRY/prope [--extra=tpu] [--tag=T] [--push] [--allow-changes] [--dry-run]
#   --extra           tpu, gpu, or cpu for neither          --tag   by default the commit, 12 digits
#   --push            push it, for the cluster to pull
#   --allow-changes   tracked files with changes that are not committed go into it
#   --dry-run         print the commands and run nothing
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

image='' extra=tpu tag='' push='' changes='' dry_run=''
while (($#)); do
  case $1 in
    --image=*) image=${1#*=} ;;
    --extra=*) extra=${1#*=} ;;
    --tag=*) tag=${1#*=} ;;
    --push) push=yes ;;
    --allow-changes) changes=yes ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage && exit ;;
    *) fail "$1: there is no such flag; --help lists them" ;;
  esac
  shift
done
[[ $image =~ ^[a-z0-9]([-a-z0-9._/:]*[a-z0-9])?$ ]] ||
  fail "--image=$image: must be an image's name without tag, as in europe-docker.pkg.dev/PROJECT/REPOSITORY/prope"
[[ $extra =~ ^(tpu|gpu|cpu)$ ]] || fail "--extra=$extra: must be tpu, gpu or cpu"
[[ -z $tag || $tag =~ ^[A-Za-z0-9_][-A-Za-z0-9_.]*$ ]] ||
  fail "--tag=$tag: must be of letters, digits, hyphens and dots"
tree=$(committed_tree "$changes")
hash=$(commit)
if [[ -z $tag ]]; then
  tag=${hash:0:12}
  [[ $hash != *+changes ]] || tag+=-changes
fi
[[ $extra != cpu ]] || extra=

build=(docker build --file=launch/Dockerfile --build-arg="EXTRA=$extra" --build-arg="COMMIT=$hash"
  --tag="$image:$tag" -)
if [[ $dry_run ]]; then
  echo "$(quoted git -C "$ROOT" archive "$tree") | $(quoted "${build[@]}")"
  [[ -z $push ]] || quoted docker push "$image:$tag"
else
  git -C "$ROOT" archive "$tree" | "${build[@]}" >&2
  [[ -z $push ]] || docker push "$image:$tag" >&2
fi
echo "$image:$tag"
