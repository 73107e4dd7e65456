# An image for rented instances on Google Cloud, with the agent and PyTorch in /opt/sailor.
#
#   python -m build --wheel --no-isolation --outdir images/built && cp constraints.txt images/built
#   packer init images/gce.pkr.hcl
#   packer build -var project=PROJECT images/gce.pkr.hcl
#
# It is built on a small machine without a GPU.
packer {
  required_plugins {
    googlecompute = {
      source  = "github.com/hashicorp/googlecompute"
      version = ">= 1.1.4"
    }
  }
}

variable "project" {
  type = string
}

variable "zone" {
  type    = string
  default = "us-central1-a"
}

# Packages that your scripts need on every node, such as "transformers peft".
variable "packages" {
  type    = string
  default = ""
}

source "googlecompute" "sailor" {
  project_id              = var.project
  zone                    = var.zone
  machine_type            = "e2-standard-8"
  source_image_family     = "common-cu129-ubuntu-2404-nvidia-580"
  source_image_project_id = ["deeplearning-platform-release"]
  disk_size               = 100
  disk_type               = "pd-ssd"
  ssh_username            = "packer"
  image_name              = "sailor-{{timestamp}}"
  image_family            = "sailor"
  image_description       = "Sailor's agent and PyTorch in /opt/sailor"
}

build {
  sources = ["source.googlecompute.sailor"]

  provisioner "file" {
    source      = "${path.root}/built"
    destination = "/tmp"
  }

  provisioner "file" {
    source      = "${path.root}/install.sh"
    destination = "/tmp/install.sh"
  }

  provisioner "shell" {
    inline = [
      "sudo apt-get -qq update && sudo apt-get -qq -y install python3-venv",
      "sudo bash /tmp/install.sh /tmp/built ${var.packages}",
      "sudo rm -rf /tmp/built /tmp/install.sh",
    ]
  }
}
