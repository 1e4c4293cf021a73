#!/usr/bin/env bash
# Runs a command on TPU slices of a GKE cluster, as a JobSet.
#   bash launch/gke_jobset.sh --name=N --image=I --type=v5p --topology=4x4x4 --claim=C --wait -- \
#       python -m prope.train --config=configs/gemma_2b_wiki.py --workdir=/data/N
#   --name=N             of the JobSet: at most 40 small letters, digits and hyphens
#   --image=I            built and pushed by launch/image.sh
#   --type=v5p           v5e, v5p or v6e
#   --topology=4x4x4     shape of a slice in chips
#   --slices=1           number of slices
#   --claim=C            PersistentVolumeClaim to mount, which many pods may write
#   --bucket=B           or a Cloud Storage bucket to mount, by GKE's FUSE driver
#   --mount=/data        where to mount it
#   --service_account=default   of Kubernetes; for a bucket, one that may write to it
#   --namespace=default  of Kubernetes
#   --spot               use Spot nodes
#   --max_restarts=50    of the JobSet: a pod that ends restarts all; exit codes 1, 2 and 130 end the JobSet
#   --grace_seconds=600  between SIGTERM and SIGKILL
#   --wait               poll until the JobSet ends. Completed: exit code 0, and the last line of process 0 on stdout;
#                        failed: exit code 1
#   --poll=30            seconds between polls, with --wait
#   --dry-run            print the YAML and run nothing
# A JobSet of that name that has ended is replaced; a running one is left alone. The cluster needs JobSet 0.7 or later.
# Run this in the environment where prope is installed, which has PyYAML.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

name='' image='' type='' topology='' slices=1 claim='' bucket='' mount=/data service_account=default
namespace=default spot='' max_restarts=50 grace_seconds=600 wait='' poll=30 dry_run=''
parse_flags "name image type topology slices claim bucket mount service_account namespace max_restarts grace_seconds poll" \
  "spot wait dry_run" "$@"
shift "$parsed"
# word --flag VALUE: fails if Kubernetes would not accept VALUE as a name.
word() {
  [[ $2 =~ ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$ ]] || fail "$1=$2: must be of small letters, digits, hyphens and dots"
}
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  fail "--name=$name: must be of small letters, digits and hyphens, begin with a letter, 40 at most"
[[ $image ]] || fail "--image: give the image to run; launch/image.sh builds one"
for flag in slices max_restarts grace_seconds poll; do
  positive "--$flag" "${!flag}"
done
word --namespace "$namespace"
word --service_account "$service_account"
[[ $mount =~ ^/[-A-Za-z0-9_./]+$ ]] || fail "--mount=$mount: must be an absolute path"
(($#)) || fail "no command: give it after --, as in: -- python -m prope.train --config=.. --workdir=$mount/$name"

# Slices as GKE offers them on machines of four chips (one for 1x1). Source: GKE's documentation, "Plan TPUs in GKE".
flat='1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16'
case $type in
  v5e) accelerator=tpu-v5-lite-podslice ;;
  v5p) accelerator=tpu-v5p-slice ;;
  v6e) accelerator=tpu-v6e-slice ;;
  *) fail "--type=$type: must be v5e, v5p or v6e" ;;
esac
if [[ $type == v5p ]]; then
  [[ $topology =~ ^([1-9][0-9]?)x([1-9][0-9]?)x([1-9][0-9]?)$ ]] ||
    fail "--topology=$topology: a slice of v5p has three sides, such as 4x4x4"
  a=${BASH_REMATCH[1]} b=${BASH_REMATCH[2]} c=${BASH_REMATCH[3]} chips=$((a * b * c))
  [[ " 2x2x1 2x2x2 2x2x4 2x4x4 " == *" $topology "* ]] ||
    ((a % 4 + b % 4 + c % 4 == 0 && a <= b && b <= c && chips <= 6144)) ||
    fail "--topology=$topology: v5p has 2x2x1, 2x2x2, 2x2x4, 2x4x4, or multiples of 4 that rise, up to 6144 chips"
else
  [[ " $flat " == *" $topology "* ]] || fail "--topology=$topology: $type has $flat"
  chips=$((${topology%x*} * ${topology#*x}))
fi
per_host=$((chips < 4 ? chips : 4)) hosts=$((chips < 4 ? 1 : chips / 4))
((slices == 1 || hosts > 1)) || fail "--slices=$slices: several slices need several hosts each; $topology has one"

gcsfuse=false
if [[ $claim && -z $bucket ]]; then
  word --claim "$claim"
  volume='{"name": "work", "persistentVolumeClaim": {"claimName": "'$claim'"}}'
elif [[ $bucket && -z $claim ]]; then
  [[ $bucket =~ ^[a-z0-9][-_.a-z0-9]*$ ]] || fail "--bucket=$bucket: must be a bucket's name, without gs://"
  gcsfuse=true
  volume='{"name": "work", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": false, "volumeAttributes": '
  volume+='{"bucketName": "'$bucket'", "mountOptions": "implicit-dirs"}}}'
else
  fail "give one of --claim and --bucket: checkpoints need a place that outlives a pod"
fi
selector='{"cloud.google.com/gke-tpu-accelerator": "'$accelerator'", "cloud.google.com/gke-tpu-topology": "'$topology'"'
[[ -z $spot ]] || selector+=', "cloud.google.com/gke-spot": "true"'

yaml=$("${PYTHON:-python}" "$ROOT/launch/fill_yaml.py" "$ROOT/launch/gke_jobset.yaml" \
  "name=$name" "namespace=$namespace" "commit=$(commit)" "max_restarts=$max_restarts" "slices=$slices" \
  "hosts=$hosts" "gcsfuse=$gcsfuse" "service_account=$service_account" "grace_seconds=$grace_seconds" \
  "node_selector=$selector}" "image=$image" "platform=$type" "processes=$((hosts * slices))" "mount=$mount" \
  "chips=$per_host" "volume=$volume" -- "$@")
if [[ $dry_run ]]; then
  echo "$yaml"
  exit
fi

# Prints the JobSet's name and terminal state; its name alone while it runs; nothing if there is none.
state() {
  kubectl get jobset "$name" --namespace="$namespace" --ignore-not-found \
    --output=jsonpath='{.metadata.name} {.status.terminalState}'
}
before=$(state)
case $before in
  '') ;;
  *Completed | *Failed) kubectl delete jobset "$name" --namespace="$namespace" >&2 ;;
  *) fail "--name=$name: such a JobSet runs; end it with kubectl delete jobset $name, or take another name" ;;
esac
kubectl create --filename=- <<<"$yaml" >&2
first=(--namespace="$namespace" --container=prope --selector="jobset.sigs.k8s.io/jobset-name=$name,\
jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0") # the pod of process 0
echo "follow it: $(quoted kubectl logs --follow "${first[@]}")" >&2
[[ $wait ]] || exit 0
failures=0
while :; do
  sleep "$poll"
  if after=$(state); then
    failures=0
  else
    failures=$((failures + 1))
    if ((failures == 5)); then
      echo "lost: the cluster does not answer; the JobSet $name goes on without this" >&2
      exit 76
    fi
    continue
  fi
  case $after in
    *Completed)
      kubectl logs --tail=1 "${first[@]}" || true
      exit 0
      ;;
    *Failed) echo "stopped: the JobSet $name has failed; its pods' logs say why" >&2 && exit 1 ;;
    '') echo "stopped: the JobSet $name has been deleted" >&2 && exit 1 ;;
  esac
done
