#!/usr/bin/env bash
# Builds the image of launch/Dockerfile from the committed files, and prints its name as the last line.
#   bash launch/image.sh --image=us-docker.pkg.dev/PROJECT/REPOSITORY/prope --push
#   --image=NAME      name of the image; its tag is the first 12 digits of the commit
#   --extra=tpu       tpu, gpu, or cpu for neither
#   --tag=T           by default the first 12 digits of the commit
#   --push            push the image, for the cluster to pull
#   --allow-changes   include uncommitted changes of tracked files
#   --dry-run         print the commands and run nothing
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

image='' extra=tpu push='' allow_changes='' dry_run=''
parse_flags "image extra" "push allow_changes dry_run" "$@"
shift "$parsed"
refuse_arguments "$@"
[[ $image =~ ^[a-z0-9]([-a-z0-9._/:]*[a-z0-9])?$ ]] ||
  fail "--image=$image: must be an image's name without tag, as in europe-docker.pkg.dev/PROJECT/REPOSITORY/prope"
[[ $extra =~ ^(tpu|gpu|cpu)$ ]] || fail "--extra=$extra: must be tpu, gpu or cpu"
tree=$(committed_tree "$allow_changes")
hash=$(commit)
tag=${hash:0:12}
[[ $hash != *+changes ]] || tag+=-changes
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
